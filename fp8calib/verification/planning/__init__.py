"""Which scheme each group of linears gets, and which layers keep their cache, under a budget."""
