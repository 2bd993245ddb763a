"""Pure renamings. usage: rn.py ROOT SPEC [--apply]"""
import ast, io, os, re, sys, tokenize, collections, pathlib, time, keyword
sys.path.insert(0,'renaming')
from lsp import Lsp
ROOT=pathlib.Path(sys.argv[1]).resolve(); SPEC=pathlib.Path(sys.argv[2]); APPLY='--apply' in sys.argv
import subprocess
files=[f for f in subprocess.run(['git','ls-files'],cwd=ROOT,capture_output=True,text=True).stdout.split('\n') if f and (ROOT/f).exists()]
PY=[f for f in files if f.endswith(('.py','.pyi'))]
TXT=[f for f in files if f.endswith(('.py','.pyi','.md','.toml','.sh','.sbatch','.pbs','.flux','.js','.html','.yml','.json','.cpp','.cu','.h','.hpp')) or f in('Makefile',) or '/sites/' in f]
TXT=[f for f in TXT if not f.startswith(('benchmarks/results/',)) and f!='CHANGELOG.md']
ns={}
exec(SPEC.read_text(),ns)
def rows(k): return [l.split('#')[0].split() for l in ns.get(k,'').split('\n') if l.split('#')[0].strip()]
text={f:(ROOT/f).read_text() for f in set(PY)|set(TXT)}
edits=collections.defaultdict(dict)  # file -> {(line,col,end):new}
def defpos(file,spec):
    t=ast.parse(text[file]); lines=text[file].split('\n')
    m=re.fullmatch(r'([\w.]+?)(?:\((\w+)\))?',spec); names=m[1].split('.'); param=m[2]
    body=t.body; node=None
    for n in names:
        found=None
        for x in body:
            if isinstance(x,(ast.ClassDef,ast.FunctionDef)) and x.name==n: found=x; break
            if isinstance(x,ast.AnnAssign) and isinstance(x.target,ast.Name) and x.target.id==n: found=x.target; break
            if isinstance(x,ast.Assign) and any(isinstance(y,ast.Name) and y.id==n for y in x.targets): found=next(y for y in x.targets if isinstance(y,ast.Name) and y.id==n); break
        if found is None and node is not None:
            for x in ast.walk(node):
                if isinstance(x,ast.Attribute) and isinstance(x.value,ast.Name) and x.value.id=='self' and x.attr==n and isinstance(x.ctx,ast.Store):
                    return x.end_lineno-1, x.end_col_offset-len(n)
        if found is None: raise SystemExit(f'{file}: no {n} of {spec}')
        node=found; body=getattr(node,'body',[])
    if param:
        if isinstance(node,ast.ClassDef): node=next(x for x in node.body if isinstance(x,ast.FunctionDef) and x.name=='__init__')
        a=node.args
        for x in a.posonlyargs+a.args+a.kwonlyargs:
            if x.arg==param: return x.lineno-1,x.col_offset
        raise SystemExit(f'{file}: no param {param} of {spec}')
    if isinstance(node,ast.Name): return node.lineno-1,node.col_offset
    line=lines[node.lineno-1]; i=node.lineno-1
    while not re.search(r'\b(def|class) '+node.name+r'\b',lines[i]): i+=1
    return i, re.search(r'\b(def|class) ('+node.name+r')\b',lines[i]).start(2)
lspnames=collections.defaultdict(int)
L=rows('LSP')
if L:
    lsp=Lsp(ROOT)
    first=True
    for file,spec,new in L:
        f='hpcsgd/'+file if not file.startswith(('tests/','benchmarks/','website/','hpcsgd/')) else file
        line,col=defpos(f,spec)
        if first: lsp.open(f); time.sleep(20); first=False; opened={f}
        elif f not in opened: lsp.open(f); opened.add(f)
        refs=lsp.references(f,line,col)
        old=text[f].split('\n')[line][col:]; old=re.match(r'\w+',old)[0]
        n=0
        for (g,l,c,e) in refs:
            if g.startswith(('.venv','/')) or g not in text: continue
            got=text[g].split('\n')[l][c:e]
            if got!=old: continue   # self-imports as another name
            if edits[g].get((l,c,e),new)!=new: print('CONFLICT',g,l+1,old,edits[g][(l,c,e)],new)
            edits[g][(l,c,e)]=new; n+=1
        print(f'lsp {spec} -> {new}: {n}'); sys.stdout.flush()
# local variables by type: (name, type class, new)
H=ns.get('HOVER',[])
if H:
    if not L: lsp=Lsp(ROOT); time.sleep(20)
    other=collections.Counter()
    for name,pat,new in H:
        for f in PY:
            if not re.search(r'\b'+name+r'\b',text[f]): continue
            toks=[t for t in tokenize.generate_tokens(io.StringIO(text[f]).readline) if t.type==tokenize.NAME and t.string==name]
            if not toks: continue
            lsp.open(f)
            for t in toks:
                r=lsp.request('textDocument/hover',{'textDocument':{'uri':lsp.uri(f)},'position':{'line':t.start[0]-1,'character':t.start[1]}})
                h=(r or {}).get('contents',{}); h=h.get('value','') if isinstance(h,dict) else str(h)
                if re.search(pat,h): edits[f][(t.start[0]-1,t.start[1],t.end[1])]=new
                else: other[(name,h.split('\n')[1 if h.startswith('```') and len(h.split('\n'))>1 else 0][:90])]+=1
                if not h or 'Unknown' in h: print('?',f,t.start[0],text[f].split('\n')[t.start[0]-1].strip()[:110])
            lsp.notify('textDocument/didClose',{'textDocument':{'uri':lsp.uri(f)}})
            sys.stdout.flush()
    for k,n in other.most_common(60): print('left',n,k)
TOK={r[0]:r[1] for r in rows('TOKENS')}
PAT=[(re.compile(a),b,g) for a,b,g in ns.get('ATTR',[])]
for f in PY:
    try: toks=list(tokenize.generate_tokens(io.StringIO(text[f]).readline))
    except Exception as e: print('tok',f,e); continue
    for t in toks:
        if t.type==tokenize.NAME and t.string in TOK and not (t.string in ns.get('EXCL',{}) and re.search(ns['EXCL'][t.string],f)):
            k=(t.start[0]-1,t.start[1],t.end[1])
            edits[f].setdefault(k,TOK[t.string])
KW=[(set(a.split()),b,c) for a,b,c in ns.get('KW',[])]
for f in PY:
    if not KW: break
    t=ast.parse(text[f])
    for n in ast.walk(t):
        if isinstance(n,ast.Call):
            fn=n.func.attr if isinstance(n.func,ast.Attribute) else n.func.id if isinstance(n.func,ast.Name) else None
            for k in n.keywords:
                for fs,o,w in KW:
                    if fn in fs and k.arg==o:
                        line=text[f].split('\n')[k.lineno-1]; c=len(line.encode()[:k.col_offset].decode())
                        if line[c:c+len(o)]==o: edits[f].setdefault((k.lineno-1,c,c+len(o)),w)
def in_kw(f,s): return kwtext(s)
def kwtext(s):
    for fs,o,w in KW:
        s=re.sub(r'\b('+'|'.join(fs)+r')\(((?:[^()\n]|\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\))*?)\b'+o+'=',lambda m:m[1]+'('+m[2]+w+'=',s)
    return s
print({f:len(e) for f,e in list(edits.items())[:0]})
def u16(line,c): return c
out={}
for f in text:
    s=text[f]
    if f in edits:
        ls=s.split('\n')
        for (l,c,e),new in sorted(edits[f].items(),reverse=True):
            ls[l]=ls[l][:c]+new+ls[l][e:]
        s='\n'.join(ls)
    out[f]=s
TICK=dict(TOK); TICK.update({r[0]:r[1] for r in rows('TICKS')})
tick=re.compile(r'`([^`\n]+)`')
words={r[0]:r[1] for r in rows('WORDS')}
wre=re.compile(r'(?<![\w])('+'|'.join(map(re.escape,sorted(words,key=len,reverse=True)))+r')(?![\w])') if words else None
tre=re.compile(r'\b('+'|'.join(map(re.escape,TICK))+r')\b') if TICK else None
STR=[(re.compile(a,re.M),b,(re.compile(g[0]) if g else None)) for a,b,*g in ns.get('STRSUBS',[])]
def in_strings(f,s):
    if not f.endswith(('.py','.pyi')):
        return strsub(f,s)
    try: toks=list(tokenize.generate_tokens(io.StringIO(s).readline))
    except Exception: return s
    starts=[0]
    for l in s.split('\n'): starts.append(starts[-1]+len(l)+1)
    o=[];at=0
    for t in toks:
        if t.type in (tokenize.STRING,tokenize.COMMENT):
            a=starts[t.start[0]-1]+t.start[1]; b=starts[t.end[0]-1]+t.end[1]
            o.append(s[at:a]); o.append(strsub(f,s[a:b])); at=b
    o.append(s[at:]); return ''.join(o)
def in_toml(f,s):
    if not f.endswith(('.py','.pyi')): return ns['toml'](f,s)
    global strsub
    keep=strsub; strsub=lambda f,x: ns['toml'](f,x)
    try: return in_strings(f,s)
    finally: strsub=keep
scnt=collections.Counter()
def strsub(f,x):
    for a,b,g in STR:
        if g is None or g.search(f):
            x,n=a.subn(b,x); scnt[a.pattern]+=n
    return x
ARGS=ns.get('ARGS',{})
def docargs(f,s):
    """Rename entries of Args sections and of Raises, where the signature has the new name."""
    if not f.endswith('.py') or not ARGS: return s
    try: t=ast.parse(s)
    except SyntaxError: return s
    L=s.split('\n')
    for n in ast.walk(t):
        if isinstance(n,(ast.FunctionDef,ast.ClassDef)) and ast.get_docstring(n,clean=False):
            names=set()
            for x in ast.walk(n):
                if isinstance(x,ast.FunctionDef):
                    names|={y.arg for y in x.args.args+x.args.kwonlyargs}
            if isinstance(n,ast.ClassDef): names|={x.target.id for x in n.body if isinstance(x,ast.AnnAssign) and isinstance(x.target,ast.Name)}
            d=n.body[0]
            for i in range(d.lineno-1,d.end_lineno):
                m=re.match(r'( +)(\w+)(: )',L[i])
                if m and m[2] in ARGS and m[2] not in names:
                    for new in ARGS[m[2]].split():
                        if new in names: L[i]=m[1]+new+m[3]+L[i][m.end():]; break
    return '\n'.join(L)
subs=[(re.compile(a,re.M),b,(re.compile(g[0]) if g else None)) for a,b,*g in ns.get('SUBS',[])]
cnt=collections.Counter()
for f in TXT:
    s=out[f]
    if tre: s=tick.sub(lambda m:'`'+tre.sub(lambda x:TICK[x[1]],m[1])+'`',s)
    if wre: s=wre.sub(lambda m:words[m[1]],s)
    if KW: s=in_kw(f,s)
    if STR: s=in_strings(f,s)
    s=docargs(f,s)
    if 'toml' in ns and not ns['SKIP'].search(f): s=in_toml(f,s)
    for a,b,g in subs:
        if g is None or g.search(f):
            s,n=a.subn(b,s); cnt[a.pattern]+=n
    out[f]=s
for a,n in list(cnt.items())+list(scnt.items()): print(n,a)
ch=[f for f in out if out[f]!=text[f]]
print(len(ch),'files change')
if APPLY:
    for f in ch: (ROOT/f).write_text(out[f])
    mv=[(a,b) for a,b in rows('MOVES')]
    for a,b in mv:
        os.makedirs((ROOT/b).parent,exist_ok=True); subprocess.run(['git','mv',a,b],cwd=ROOT,check=True)
    if mv:
        # module paths
        m=[(a[:-3].replace('/','.'),b[:-3].replace('/','.'),a,b) for a,b in mv if a.endswith('.py')]
        for f in subprocess.run(['git','ls-files'],cwd=ROOT,capture_output=True,text=True).stdout.split('\n'):
            p=ROOT/f
            if not f or not p.exists() or f=='CHANGELOG.md' or f.startswith('benchmarks/results') or p.suffix not in('.py','.pyi','.md','.toml','.yml','.sh'): continue
            s=o=p.read_text()
            for am,bm,a,b in m:
                for x,y in ((am,bm),(a,b)):
                    s=re.sub(r'(?<![\w.])'+re.escape(x)+r'(?![\w])',y,s)
                x,y=a.removeprefix('hpcsgd/'),b.removeprefix('hpcsgd/')
                s=re.sub(r'(?<![\w/.])'+re.escape(x)+r'(?![\w])',y,s)
                pa,na=am.rsplit('.',1); pb,nb=bm.rsplit('.',1)
                if pa==pb and na!=nb:
                    s=re.sub(r'(from '+re.escape(pa)+r' import [^\n]*?)\b'+na+r'\b',lambda mm:mm[1]+nb if True else '',s)
            if s!=o: p.write_text(s)
