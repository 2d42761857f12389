"""`make demo`: a small recommender on several ranks, without balancing and with it."""
