"""Cut the layers of an ordinary model over the workers of one replica: `find.find_plan`, then `apply.apply_plan`."""
