"""Plug-ins that ship with fp8calib. The core imports none of them."""
