import subprocess,json,re,tokenize,io,sys
r=subprocess.run(['.venv/bin/ruff','check','hpcsgd','tests','benchmarks','website','examples','packaging','--select','E501','--output-format','json'],capture_output=True,text=True)
byf={}
for e in json.loads(r.stdout): byf.setdefault(e['filename'],[]).append(e['location']['row'])
for f,rows in byf.items():
    for _ in range(60):
        s=open(f).read(); L=s.split('\n')
        inside={}
        for t in tokenize.generate_tokens(io.StringIO(s).readline):
            if t.type==tokenize.STRING and t.string.startswith(('"""','r"""')):
                for i in range(t.start[0],t.end[0]+1): inside[i]='doc'
            elif t.type==tokenize.COMMENT and L[t.start[0]-1].lstrip().startswith('#'): inside[t.start[0]]='com'
        bad=[i for i,l in enumerate(L,1) if len(l)>110 and i in inside]
        if not bad: break
        i=bad[0]; l=L[i-1]; k=inside[i]
        ind=re.match(r' *',l)[0]; pre=ind+('# ' if k=='com' else '')
        if '>>>' in l or l.lstrip().startswith('... '): print('CODE',f,i,l); break
        close=''
        if k=='doc' and l.endswith('"""') and len(l)-3<=110:  # closing quotes too long
            L[i-1]=l[:-3].rstrip(); L.insert(i,ind+'"""'); open(f,'w').write('\n'.join(L)); continue
        cut=l.rfind(' ',len(pre)+10,111)
        if cut<0: print('CUT',f,i,l); break
        rest=l[cut+1:]; L[i-1]=l[:cut]
        nxt=L[i] if i<len(L) else ''
        entry=re.match(r' +\w+: ',l) and k=='doc' and len(ind)>=8 or re.match(r' +(Args|Raises|Returns)',L[i-2] if i>1 else '')
        same=inside.get(i+1)==k and nxt.strip() and not nxt.strip().startswith(('"""','>>>','- ','Args:','Raises:','Returns:','Example')) and (re.match(r' *(# )?',nxt)[0]==pre or (entry and re.match(r' *',nxt)[0]==ind+'    ')) and not (re.match(r' +\w+: ',nxt) and len(ind)>=8 and re.match(r' *',nxt)[0]==ind and entry)
        if rest.endswith('"""') : same=False
        if same:
            p=re.match(r' *(# )?',nxt)[0]; L[i]=p+rest+' '+nxt[len(p):]
        else:
            L.insert(i,(pre if k=='com' else (ind+'    ' if entry else ind))+rest)
        open(f,'w').write('\n'.join(L))
