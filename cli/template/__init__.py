"""Templates: found, fetched, trusted, read, rendered and tried."""
