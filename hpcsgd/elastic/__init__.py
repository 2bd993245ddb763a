"""Groups that may die: jobs of their own, which meet through a register of those that are alive."""
