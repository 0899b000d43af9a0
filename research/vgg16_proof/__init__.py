"""VGG16 at scarce memory has no plan as short as was hoped for (the paper's memory model)."""
