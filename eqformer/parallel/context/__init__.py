"""Context parallelism: attention over rows that are split over devices."""
