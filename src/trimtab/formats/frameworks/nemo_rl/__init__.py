"""NeMo RL: configuration and logs."""
