"""What runs inside a serving engine, and what talks to it there."""
