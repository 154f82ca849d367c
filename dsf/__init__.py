"""Write a recurrence as its paper does; compile, check and analyse it."""
