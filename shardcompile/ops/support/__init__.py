"""What several families of ops use."""
