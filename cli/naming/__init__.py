"""Names: of classes and modules, of torch.nn's classes, and numbers as people write them."""
