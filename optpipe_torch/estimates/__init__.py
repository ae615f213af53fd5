"""`optpipe profile --model --gpu`: operations and bytes counted on the meta device, times from data sheets."""
