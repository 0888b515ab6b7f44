"""The drafter's bytes: layout and heads of a rank, routes, facts, and copies of rows."""
