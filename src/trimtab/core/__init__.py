"""What every layer shares: errors, reasons, the codec, checks of numbers and of plain data."""
