"""What is kept, what goes, and what is written anew for that: policy, plan, thinning, collection."""
