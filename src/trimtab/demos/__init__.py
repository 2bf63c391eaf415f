"""The programs behind `trimtab demo`."""
