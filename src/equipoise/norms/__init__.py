"""norms"""
