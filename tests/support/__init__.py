"""Code that tests of several departments share."""
