"""Plans by random steps, each judged by one greedy schedule."""
