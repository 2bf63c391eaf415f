"""What every HTTP server here shares: listening, tokens, limits of heads."""
