"""What operators see: metrics, receipts, log lines. Knows values from `types` only, never who makes them."""
