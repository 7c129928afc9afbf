"""What values and variables are; this room knows no process and no socket."""
