"""Real engines that run MiniMax-M3's architecture: one set of four, of one, one, two and four ranks, serves the whole package."""
