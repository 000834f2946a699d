"""Receipts: made of a verification, read, checked and signed."""
