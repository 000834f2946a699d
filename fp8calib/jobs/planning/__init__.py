"""What `plan` opens, measures and writes."""
