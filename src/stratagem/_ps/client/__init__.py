"""Code that talks to parameter servers, in the coordinator and in workers."""
