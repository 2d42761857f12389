"""Jobs as launchers start them."""
