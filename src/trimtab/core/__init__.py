"""What every layer shares: errors, reasons, codec, resources, checks of numbers and of plain data."""
