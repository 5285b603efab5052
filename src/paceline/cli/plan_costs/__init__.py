"""What `paceline plan SCRIPT --cluster NAME` adds: what a step costs there, what fits, other plans and clusters."""
