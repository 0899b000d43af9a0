"""HiRemate: a graph as clusters of clusters, each solved once and combined level by level."""
