"""Mirror of torch.utils: data."""
