"""The drafter's KV on a rank: layout and heads, routes, facts, and copies of rows."""
