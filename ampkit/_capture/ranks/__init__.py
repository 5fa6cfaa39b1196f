"""What several processes decide together, and how they end."""
