"""Variables on parameter servers: the store, its server, and its clients."""
