"""The import path of verl's trainer: `ppo.ray_trainer`."""
