"""The requests of `calibrate` and `verify`, and the options that several commands share."""
