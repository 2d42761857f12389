"""Jobs that are killed at random moments and go on, until every sample of every epoch has been trained once."""
