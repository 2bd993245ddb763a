"""What is found out before a long job: how many groups it can stand."""
