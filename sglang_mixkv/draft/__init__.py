"""Which bytes are the drafter's: layout and heads of a rank, routes, facts, and copies of rows."""
