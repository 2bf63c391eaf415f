"""Adapters that connect trimtab's rollout pool to trainers without patching them, a module per trainer."""
