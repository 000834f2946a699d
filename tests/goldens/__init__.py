"""What the product does through its public doors, recorded (`CHANGES.md` says when and why)."""
