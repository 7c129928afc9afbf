"""Tables of rows: parameters that are looked up by id and never fetched whole."""
