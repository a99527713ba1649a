"""Models whose tokens all see each other: their texts are computed whole, and nothing of them is cached."""
