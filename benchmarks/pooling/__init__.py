"""A simulated cluster that elastic training runs share: measured runs, submissions, policies."""
