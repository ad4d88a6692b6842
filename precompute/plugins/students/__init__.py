"""Students: cheaper models that approximate a view's own, made from what it published; one may
compute the view's misses in its stead."""
