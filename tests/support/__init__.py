"""What tests of several departments need."""
