"""Our side: the same work with Stratagem, written as a user would write it."""
