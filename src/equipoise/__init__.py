"""equipoise"""
