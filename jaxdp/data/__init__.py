"""Data sources, decoding, augmentation, sample order and prefetching to the devices."""
