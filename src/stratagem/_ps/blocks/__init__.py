"""Block files of checkpoints: format, writer and reader, for servers and coordinators."""
