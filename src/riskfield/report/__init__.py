"""The evaluation of predictions, and an HTML report that shows them."""
