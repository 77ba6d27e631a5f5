"""What ``raystow doctor`` looks at: each check answers with a finding, and none lets an error through."""
