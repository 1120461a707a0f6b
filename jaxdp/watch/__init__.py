"""`jaxdp watch`: a page on localhost that shows runs while they train, made from their directories by `jaxdp.report`."""
